"""What a run says when it ends: summary, pictures, comparison with other runs, and the forecast before it."""
