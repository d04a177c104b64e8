"""How a job starts: ``p3 launch`` for one machine, ``p3 run`` for one process of any job."""
