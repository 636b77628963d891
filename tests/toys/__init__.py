"""What the tests of ``CONTRIBUTING.md`` add: edits of the sources, and a program that uses the result."""
