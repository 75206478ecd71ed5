"""The laws: equalities generated from a spec, the wirings they are tried on, and the bugs they are tried with."""
