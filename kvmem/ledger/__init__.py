"""The ledger: blocks, frames, tables and the trie as integers; see README.md for its rules."""

from .ledger import Ledger, Refusal, StepArrays

__all__ = ["Ledger", "Refusal", "StepArrays"]
