assert len(field) == 7 and (values[:, 0, 0] == numbers).all()
field.close()
