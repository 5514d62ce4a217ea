"""Plans that people run and copy, named for model, length and hardware.

Lives here: plan files, each with one function that returns a Plan, and the data that the shipped ones need. They are
ordinary Python, written to be read. ``engine execute NAME`` finds one of them where no file of that name exists.

May import ``stages``, ``models`` and ``engine``. Nothing imports plans.
"""
