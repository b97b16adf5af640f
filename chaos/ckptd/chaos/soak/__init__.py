"""Random schedules: several faults in one run, drawn by a seed, judged like any trial, and shrunk when they fail."""
