"""Ops that passes make: each is the composition of ops that the frontend emits."""
