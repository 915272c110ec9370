"""
Describe: what does a training loop do? Facts with their lines, and no verdict.

Whether a rate should rise ten times, or a layer be called four times, only its author knows. The
facts are those by which reports of runs that are finite and wrong were explained in the end.
"""
