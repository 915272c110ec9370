"""The gallery: published failures, each reproduced, explained and cured by one file.

Start with run_all.py.
"""
