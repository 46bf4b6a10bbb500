// Package encoder makes, for the watch tier, what its bytes are not yet: another version of an object, or the rows of a
// Table.
package conversion

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/rest"

	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/handlers"
	"watershed.dev/services/registry/storage"
)

// Encode answers one encoding for each object of r.
func Encode(ctx context.Context, scope *handlers.RequestScope, st *storage.Resource,
	r *registryv1.EncodeRequest) (*registryv1.EncodeResponse, error) {
	objects := make([]runtime.Object, len(r.Json))
	for i := range r.Json {
		o := &logv1.Object{Json: r.Json[i]}
		if i < len(r.Protobuf) {
			o.Protobuf = r.Protobuf[i]
		}
		obj, err := st.DecodeVersioned(o, func(k schema.GroupVersionKind) (runtime.Object, error) {
			return storage.SchemeFor(scope.Storage.New()).New(k)
		})
		if err != nil {
			return nil, fmt.Errorf("decode %s: %w", r.StorageResource, err)
		}
		objects[i] = obj
	}
	if r.GetOutput().GetAs().GetKind() == "Table" {
		return encodeRows(
			ctx,
			scope,
			schema.GroupVersion{Group: st.Kind.Group, Version: runtime.APIVersionInternal},
			objects,
			r,
		)
	}
	return convertObjects(scope, st, objects, r)
}

func convertObjects(scope *handlers.RequestScope, st *storage.Resource, objects []runtime.Object,
	r *registryv1.EncodeRequest) (*registryv1.EncodeResponse, error) {
	resp := &registryv1.EncodeResponse{}
	for _, obj := range objects {
		internal, err := scope.Convertor.ConvertToVersion(obj, schema.GroupVersion{
			Group:   st.Kind.Group,
			Version: runtime.APIVersionInternal,
		})
		if err != nil {
			return nil, err
		}
		out, err := scope.Convertor.ConvertToVersion(internal, scope.Kind.GroupVersion())
		if err != nil {
			return nil, err
		}
		out.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
		var data []byte
		if m, ok := out.(interface{ Marshal() ([]byte, error) }); ok &&
			r.GetOutput().GetMediaType() == runtime.ContentTypeProtobuf {
			data, err = m.Marshal()
		} else {
			data, err = json.Marshal(out)
		}
		if err != nil {
			return nil, err
		}
		resp.Objects = append(resp.Objects, data)
	}
	return resp, nil
}

// encodeRows makes a Table's rows; hub is the version that the storage has objects in.
func encodeRows(ctx context.Context, scope *handlers.RequestScope, hub schema.GroupVersion, objects []runtime.Object,
	r *registryv1.EncodeRequest) (*registryv1.EncodeResponse, error) {
	convertor := scope.TableConvertor()
	if convertor == nil {
		return nil, fmt.Errorf("%s has no table", scope)
	}
	resp := &registryv1.EncodeResponse{}
	// The columns are those of an empty list.
	lister, ok := scope.Storage.(rest.Lister)
	if !ok {
		return nil, fmt.Errorf("%s has no list", scope)
	}
	head, err := convertor.ConvertToTable(ctx, lister.NewList(), &metav1.TableOptions{})
	if err != nil {
		return nil, err
	}
	if resp.Columns, err = json.Marshal(head.ColumnDefinitions); err != nil {
		return nil, err
	}
	for _, obj := range objects {
		if err := ctx.Err(); err != nil { // nobody waits for it any more
			return nil, err
		}
		internal, err := scope.Convertor.ConvertToVersion(obj, hub)
		if err != nil {
			return nil, err
		}
		from := time.Now()
		t, err := convertor.ConvertToTable(ctx, internal, &metav1.TableOptions{NoHeaders: true})
		if err != nil {
			return nil, err
		}
		if len(t.Rows) != 1 {
			return nil, fmt.Errorf("%s: an object made %d rows", scope, len(t.Rows))
		}
		if err := includeObject(scope, &t.Rows[0], internal, r.IncludeObject); err != nil {
			return nil, err
		}
		data, ages, err := encodeRow(ctx, convertor, internal, &t.Rows[0], from)
		if err != nil {
			return nil, err
		}
		resp.Objects, resp.RowAges = append(resp.Objects, data), append(resp.RowAges, ages)
	}
	return resp, nil
}

// includeObject puts the whole object into its row where that was asked for. Metadata is the watch tier's to put in: it has
// it encoded.
func includeObject(scope *handlers.RequestScope, row *metav1.TableRow, obj runtime.Object, policy string) error {
	row.Object = runtime.RawExtension{}
	if metav1.IncludeObjectPolicy(policy) != metav1.IncludeObject {
		return nil
	}
	versioned, err := scope.Convertor.ConvertToVersion(obj, scope.Kind.GroupVersion())
	if err != nil {
		return err
	}
	versioned.GetObjectKind().SetGroupVersionKind(scope.Kind)
	row.Object = runtime.RawExtension{Object: versioned}
	return nil
}
