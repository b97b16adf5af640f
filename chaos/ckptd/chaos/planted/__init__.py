"""What the harness puts into processes that it hurts from within; its folder is the first one of their PYTHONPATH."""
