"""A proxy between agents and an S3 store that injects faults on demand, and proves that it did.

`handle` starts and commands it; `serve` is its process, `proxy` passes requests on, `spoiling` does the faults.
"""
