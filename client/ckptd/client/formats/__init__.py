"""Steps in other libraries' formats: written from an open step, read for an import; and read back to compare.

Owns: files of safetensors, torch.distributed.checkpoint and torch.save, and under which names tensors stand in them. Does
not own: the stored step (`opened_step`), or saving what was read (`importing`). Invariant: what a format cannot hold is
refused before anything is written, by name; no code runs from what is read.
"""
