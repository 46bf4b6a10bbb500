package managed

// ShapeOf exports shapeOf.
var ShapeOf = shapeOf

// ResetCache empties the cache.
func ResetCache() { cache = newCache() }
