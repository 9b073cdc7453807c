"""What runs beside a job: the message bus between node agents and the job's controller."""
