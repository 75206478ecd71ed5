"""Random programs of calls: sequences of public calls on one object, each result compared with that of a fresh object.

    python -m checks.programs                                    2,000 programs over all kinds
    python -m checks.programs --kinds engine --programs 500 --seed 3 --json
    python -m checks.programs --mutants                          how many programs find each known bug, put back

A kind (kinds.py) samples programs for one kind of object and runs them. A program is plain data, a function of (kind, seed,
number). One that fails is shrunk to the steps that matter and printed as a script. Exit code 1 where a program failed.
"""
