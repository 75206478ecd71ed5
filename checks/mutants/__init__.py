"""Known bugs, seeded one at a time, and random mutations of the sources: a law or an oracle must catch each.

    python -m checks.mutants                          every known bug (seeded/, one file per area)
    python -m checks.mutants --quick                  those whose law needs no second process and no compiler
    python -m checks.mutants --only causal padded     those that these laws catch
    python -m checks.mutants --random 50 --seed 3     random mutations of parts/, ops/, state/, base/, spec/, nn/ and parallel/

Exit code 1 where a known bug is not caught. Some random mutations cannot be caught: docs/laws.md lists them.
"""
