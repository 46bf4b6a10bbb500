// Package conversion encodes objects for the watch tier: in another version, or as rows of a Table. The event log
// contains an object only in its storage version, without rows.
//
// The package starts no goroutine and keeps no state. Each call runs on the goroutine of its RPC.
//
// # Review notes
//
//   - encodeRow moves the timestamps of its object while it prints. No other goroutine may have that object.
//   - Do not take each word like "5m" for an age: a cell can contain a duration that does not follow the clock.
//   - RowAges.complete may be set only if the row without its ages does not follow the clock. The watch tier serves
//     such rows from its cache.
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

// Encode returns an encoding of each object of r, in their order.
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

// encodeRows returns a Table's columns and the row of each object. hub is the version of objects in the storage.
func encodeRows(ctx context.Context, scope *handlers.RequestScope, hub schema.GroupVersion, objects []runtime.Object,
	r *registryv1.EncodeRequest) (*registryv1.EncodeResponse, error) {
	convertor := scope.TableConvertor()
	if convertor == nil {
		return nil, fmt.Errorf("%s has no table", scope)
	}
	resp := &registryv1.EncodeResponse{}
	// An empty list has the columns.
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
		if err := ctx.Err(); err != nil { // the caller has canceled the call
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

// includeObject sets the row's object if policy is Object. The watch tier adds metadata itself, because it has the
// metadata encoded.
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
