"""`ampx lint`: misuse of mixed precision, found in code that is not run. Needs no framework."""
