"""Ways into the engine besides Python calls: batch files, async, data pipelines, evaluation, metrics."""
