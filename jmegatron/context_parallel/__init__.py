"""Attention over a sequence that is divided over ranks. Talks on cp; see README.md."""
