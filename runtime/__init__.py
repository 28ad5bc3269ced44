"""Run artifacts: loader -> decoder -> engine -> server. Start reading at `runtime.engine.engine`."""
