"""What a run left, for a reader: report.md to paste as an issue, report.html to look at."""
