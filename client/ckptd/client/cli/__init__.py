"""Verbs that need torch; each is loaded when it is called, through the entry-point group `ckptd.commands`."""
