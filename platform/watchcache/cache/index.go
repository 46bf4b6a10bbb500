package cache

import "github.com/google/btree"

// indexed is an index entry: an object, ordered by a field's value and by key.
type indexed struct {
	value, key string
	item       *Item
}

func lessIndexed(a, b indexed) bool {
	return a.value < b.value || a.value == b.value && a.key < b.key
}

// maxIndexes bounds the indexed fields of a resource. The first list that selects by a field creates its index.
const maxIndexes = 4

// objectChange is a change of an object. removed or added is nil if the object was created or deleted.
type objectChange struct{ removed, added *Item }

// apply applies the change to the index of a field.
func (c objectChange) apply(field string, index *btree.BTreeG[indexed]) {
	if c.removed != nil {
		index.Delete(indexed{value: c.removed.Field(field), key: c.removed.Key})
	}
	if c.added != nil {
		index.ReplaceOrInsert(indexed{c.added.Field(field), c.added.Key, c.added})
	}
}

// indexBuild is an index that is being built from the objects at its start. The build does not hold the lock of the
// resource, because the goroutine that applies the events of all resources would wait for it.
type indexBuild struct {
	field string
	tree  *btree.BTreeG[*Item]
	// changes are the changes since the start. updateTree adds them.
	changes []objectChange
}

// ensureIndex builds the index of a field of a loaded resource, unless maxIndexes is reached. While another reader
// builds the index, readers scan all objects.
func (r *Resource) ensureIndex(field string) {
	if b := r.beginIndex(field); b != nil {
		r.finishIndex(b, b.build())
	}
}

func (r *Resource) beginIndex(field string) *indexBuild {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.tree == nil || r.indexes[field] != nil || r.building[field] != nil ||
		len(r.indexes)+len(r.building) >= maxIndexes {
		return nil
	}
	if r.building == nil {
		r.building = map[string]*indexBuild{}
	}
	r.building[field] = &indexBuild{field: field, tree: r.tree.Clone()}
	return r.building[field]
}

func (b *indexBuild) build() *btree.BTreeG[indexed] {
	index := btree.NewG(64, lessIndexed)
	b.tree.Ascend(func(i *Item) bool {
		objectChange{added: i}.apply(b.field, index)
		return true
	})
	return index
}

// finishIndex installs an index, unless the resource was unloaded since its start.
func (r *Resource) finishIndex(b *indexBuild, index *btree.BTreeG[indexed]) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.building[b.field] != b {
		return
	}
	delete(r.building, b.field)
	for _, c := range b.changes {
		c.apply(b.field, index)
	}
	if r.indexes == nil {
		r.indexes = map[string]*btree.BTreeG[indexed]{}
	}
	r.indexes[b.field], r.snapshot = index, nil
}
