"""The parts of `train_moe.py`: a byte-level mixture-of-experts model on a mesh of pp, dp and tp."""
