"""The engine: leader (plans), ranks (execute step records), transfer (moves records), supervisor (watches them)."""
