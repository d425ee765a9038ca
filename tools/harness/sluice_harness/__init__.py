"""Load, faults and what came of them: runs real services and judges them from outside."""
