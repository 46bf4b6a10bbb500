package managed

// ShapeOf is an object's shape.
var ShapeOf = shapeOf

// ResetCache has everything computed anew.
func ResetCache() { cache = newCache() }
