"""What a gateway reports of itself: marks, metrics, the status page."""
