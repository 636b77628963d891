"""The command lines, a module each: fit, evaluate, score, report, log, recalibrate and replay."""
