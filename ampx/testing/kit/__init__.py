"""The kit's tests by subject; `ampx.testing.BackendSuite` and `PluginSuite` gather them."""
