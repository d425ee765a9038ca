"""What each step contains: admission, the ledger of records, the prefix cache. No I/O."""
