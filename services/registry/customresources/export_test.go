package customresources

// Built reports whether the storages of a CRD are built.
func (t *Set) Built(name string) bool { return t.crd(name).versions != nil }
