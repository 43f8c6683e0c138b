"""`hybrid-ep bench`: time dispatch, combine and the pair of several implementations in one run.

command.py flags and the two roles (launcher, rank); routing.py who goes where; ledger.py the bytes in
closed form; implementations.py what is timed; session.py the interleaved measurement; checks.py exact
values; memcpy.py the machine's limit; report.py the table and the JSON.
"""
