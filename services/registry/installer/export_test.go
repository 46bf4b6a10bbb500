package installer

// HasOpenAPIDefinitions reports whether a Set holds the definitions of OpenAPI.
func HasOpenAPIDefinitions(s *Set) bool { return s.openapi.definitions != nil }
