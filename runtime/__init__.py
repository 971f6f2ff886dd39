"""Run compressed artifacts. `runtime.load(path)` is the whole interface; heavy imports wait until they are needed."""
