"""Presets: several scenarios in a row over one undisturbed pair of runs, and one verdict. Each is a file here."""
