"""MXNet's own mixed precision by its names: `mxnet.contrib.amp`, and gluon's Estimator."""
