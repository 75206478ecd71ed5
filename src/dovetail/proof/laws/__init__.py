"""The laws: equalities that every spec must satisfy, the sampled specs they are tested on, oracles, and seeded bugs."""
