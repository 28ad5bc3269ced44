"""Run artifacts: loader -> decoder -> engine -> server. Read `runtime.engine.engine` first."""
