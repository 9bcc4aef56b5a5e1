"""Resolve a stack into its index-free lock."""
