"""The prediction log: the answers of a service, the logged images, and people's labels on them.

::

    LOG/models/VERSION.json                            the classes and the task of each bundle that wrote to the log
    LOG/model=NAME/day=YYYY-MM-DD/part-UNIQUE.parquet  a row for each sampled image (:func:`.store.row_schema`)
    LOG/images/AB/SHA256.EXT                           logged images, with the bytes as received
    LOG/labels/part-UNIQUE.parquet                     people's labels (:mod:`.labels`)

Every file appears whole under its final name, and the service never changes it afterwards.  Readers ignore names that
begin with a dot.  All rows of a file are from one bundle.  :func:`.store.open_log` opens a log,
:func:`.store.read_rows` streams its rows, and :func:`.labels.join_labels` joins them with the last label on each image.

The rows with ``sampled`` true are a random sample of all images, drawn with the probability ``sample_probability``
whatever the decision on them was.  Every other row was chosen for its content: calibrate on the random sample only.
"""
