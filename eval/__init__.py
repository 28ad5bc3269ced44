"""Judge artifacts: targets -> metrics -> gate -> report. Start reading at `eval.gate`."""
