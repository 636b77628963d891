"""The prediction log: what a service answered, the images that were kept, and what people said of them.

::

    LOG/models/VERSION.json                            the classes and the task of each bundle that wrote
    LOG/model=NAME/day=YYYY-MM-DD/part-UNIQUE.parquet  a row for each image that was sampled (:mod:`.schema`)
    LOG/images/AB/SHA256.EXT                           stored images, their bytes as received
    LOG/labels/part-UNIQUE.parquet                     verdicts of people (:mod:`.labels`)

Every file appears whole, under its final name, and is never changed by the service.  Readers ignore names that begin
with a dot.  Rows of one file are of one bundle.  :func:`.store.open_log` opens a log, :func:`.rows.read_rows` streams
its rows, :func:`.labels.read_labels` has the last verdict of each image and :func:`.labels.joined` brings both
together.

The rows with ``audit`` true are a random sample of all images with the probability ``audit_probability``, whatever was
decided on them.  Everything else in the log was chosen because of what it looks like, and promises nothing of images
that were not chosen: calibrate on the audit slice only.
"""
