"""What an option is: its field and rule, its help, and how text becomes its value."""
