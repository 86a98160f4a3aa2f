"""MXNet's own mixed precision by its names: `mxnet.contrib.amp`, its conversions, and gluon's Estimator."""
