package managed

// ShapeOf is an object's shape.
var ShapeOf = shapeOf

// Forget has everything computed anew.
func Forget() { kept = newKept() }
