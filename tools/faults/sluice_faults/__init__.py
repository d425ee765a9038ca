"""Fault injection: orders are files in a directory, read by processes of ours that were started with it.

A distribution of its own. The product finds it by its entry point; where it is not installed, nothing can be injected.
"""

from sluice_faults.armed import DirectoryFaults, arm
from sluice_faults.order import Action, Order, OrderError, place, reached, withdraw

__all__ = ["Action", "DirectoryFaults", "Order", "OrderError", "arm", "place", "reached", "withdraw"]
