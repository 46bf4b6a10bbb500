package storage

import (
	"bytes"
	"encoding/json"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// marshalJSON returns json.Marshal of an object of a Go type. json.Marshal parses the JSON of each Marshaler again. For
// managedFields this takes half of the time of a pod, so marshalJSON inserts them itself. It changes obj only while it
// runs.
func marshalJSON(obj runtime.Object) ([]byte, error) {
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, err
	}
	entries := m.GetManagedFields()
	without, size := slices.Clone(entries), 0
	for i, e := range entries {
		if e.FieldsV1 == nil {
			continue
		}
		if !isFieldSet(e.FieldsV1.GetRawBytes()) {
			return json.Marshal(obj)
		}
		without[i].FieldsV1, size = &metav1.FieldsV1{}, size+len(e.FieldsV1.GetRawBytes())
	}
	if size == 0 {
		return json.Marshal(obj)
	}
	m.SetManagedFields(without)
	data, err := json.Marshal(obj)
	m.SetManagedFields(entries)
	if err != nil {
		return nil, err
	}
	out := make([]byte, 0, len(data)+size)
	for _, e := range entries {
		if e.FieldsV1 == nil {
			continue
		}
		// No string contains the key, because JSON escapes quotes in strings. metadata is the first field of an object,
		// after the empty TypeMeta.
		const key, none = `"fieldsV1":`, "null"
		before, after, ok := bytes.Cut(data, []byte(key+none))
		if !ok {
			return json.Marshal(obj)
		}
		out = append(append(append(out, before...), key...), e.FieldsV1.GetRawBytes()...)
		data = after
	}
	return append(out, data...), nil
}

// maxFieldSetDepth bounds the nesting of objects that isFieldSet accepts. json.Marshal rejects more than 10,000.
const maxFieldSetDepth = 1000

// isFieldSet returns true if data has objects and ASCII strings only, and json.Marshal would not change it. The field
// sets of managedFields whose names are ASCII have this form.
func isFieldSet(data []byte) bool {
	i, depth := 0, 0
	is := func(b byte) bool {
		if i < len(data) && data[i] == b {
			i++
			return true
		}
		return false
	}
	for {
		if depth++; !is('{') || depth > maxFieldSetDepth {
			return false
		}
		for is('}') {
			if depth--; depth == 0 {
				return i == len(data)
			}
			if is(',') {
				break
			}
			if i < len(data) && data[i] != '}' {
				return false
			}
		}
		n := stringLength(data[i:])
		if i += n; n == 0 || !is(':') {
			return false
		}
	}
}

// stringLength returns the length of a JSON string at the begin of data, if json.Marshal writes it as it is. Otherwise
// it returns 0, as for a string with escapes of other characters than quotes and backslashes.
func stringLength(data []byte) int {
	if len(data) == 0 || data[0] != '"' {
		return 0
	}
	for i := 1; i < len(data); i++ {
		switch c := data[i]; {
		case c == '"':
			return i + 1
		case c == '\\':
			if i++; i == len(data) || data[i] != '"' && data[i] != '\\' {
				return 0
			}
		case c < ' ' || c > '~' || c == '<' || c == '>' || c == '&':
			return 0
		}
	}
	return 0
}
