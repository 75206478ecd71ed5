"""The tree as data: parts with their fields, scopes, weights and decode state, its folds and checks. Imports no torch."""
