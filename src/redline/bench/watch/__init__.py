"""These modules watch a training script from inside its own process.

They are loaded into the user's process, whose interpreter may have neither Redline nor its dependencies. So the files of
this folder import the standard library, torch and each other (relatively), nothing else. What they see goes into a spool
folder, which the desk reads while the script runs and after it has ended, however it ended.
"""
