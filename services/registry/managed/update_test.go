package managed_test

import (
	"fmt"
	"math/rand"
	"reflect"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/kubernetes/pkg/apis/coordination"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	"watershed.dev/services/registry/handlers"
	"watershed.dev/services/registry/internal/fixture"
	"watershed.dev/services/registry/managed"
)

// entries formats an object's managedFields. A recent time is "now".
func entries(obj runtime.Object) string {
	m, err := meta.Accessor(obj)
	if err != nil {
		return "no metadata"
	}
	out := ""
	for _, e := range m.GetManagedFields() {
		at := "now"
		if e.Time != nil && time.Since(e.Time.Time) > time.Minute {
			at = e.Time.UTC().Format(time.RFC3339)
		}
		out += fmt.Sprintln(at, e.Manager, e.Operation, e.APIVersion, e.Subresource, e.FieldsType, e.FieldsV1)
	}
	return out
}

// aged gives the managedFields of an object times in the past, an hour apart.
func aged(obj runtime.Object) runtime.Object {
	m, err := meta.Accessor(obj)
	if err != nil { // it has no metadata
		return obj
	}
	fields := m.GetManagedFields()
	for i := range fields {
		fields[i].Time = &metav1.Time{Time: time.Now().Add(-time.Duration(i+1) * time.Hour).UTC().Truncate(time.Second)}
	}
	m.SetManagedFields(fields)
	return obj
}

// changed returns a copy of an object with changed values. It has the managedFields of the object, or none.
func changed(obj runtime.Object, r *rand.Rand, oneIn int, keepFields bool) runtime.Object {
	obj = obj.DeepCopyObject()
	m, err := meta.Accessor(obj)
	if err != nil {
		return obj
	}
	fields := m.GetManagedFields()
	m.SetManagedFields(nil)
	if oneIn != nothing {
		change(reflect.ValueOf(obj), r, false, oneIn)
	}
	if keepFields {
		m.SetManagedFields(fields)
	}
	return obj
}

// Updated objects have the managedFields that upstream's field manager computes. This holds for all built-in kinds, for
// old and new managers, and whether the outcome is cached.
func TestUpdatedFieldsAreUpstreams(t *testing.T) {
	kinds, withCached := 0, 0
	for _, scope := range managedScopes(t) {
		kinds++
		before := managed.CachedUpdates()
		for seed := range int64(2) {
			updated(t, scope, seed)
		}
		if managed.CachedUpdates() > before {
			withCached++
		}
	}
	if kinds < 80 || withCached < kinds*2/3 {
		t.Errorf("%d kinds, %d have cached updates", kinds, withCached)
	}
}

// updated compares Update with upstream for an object of two managers and random changes.
func updated(t *testing.T, scope *handlers.RequestScope, seed int64) {
	t.Helper()
	obj, err := scope.UnsafeConvertor.ConvertToVersion(newOf(t, scope), scope.HubGroupVersion())
	if err != nil {
		t.Fatal(scope.Kind, err)
	}
	filler(seed).Fill(obj)
	r := rand.New(rand.NewSource(seed))
	created := aged(scope.FieldManager.UpdateNoErrors(newOf(t, scope), obj.DeepCopyObject(), "a"))
	live := aged(scope.FieldManager.UpdateNoErrors(created, changed(created, r, textAlone, true), "b"))
	for i, oneIn := range []int{timesAlone, everyText, everyText, 20} {
		other := changed(live, r, oneIn, i%2 == 0)
		for _, manager := range []string{"a", "b", "c"} {
			want := entries(scope.FieldManager.UpdateNoErrors(live.DeepCopyObject(), other.DeepCopyObject(), manager))
			before := live.DeepCopyObject()
			got := entries(scope.FieldManager.Update(before, other.DeepCopyObject(), manager))
			if got != want {
				t.Fatalf("%v, seed %d, %d, %q:\n%swant\n%s", scope.Kind, seed, oneIn, manager, got, want)
			}
			if entries(before) != entries(live) {
				t.Fatalf("%v: the live object has changed", scope.Kind)
			}
		}
	}
}

// Updates of a custom resource have upstream's managedFields too.
func TestUpdatedFieldsOfCustomResources(t *testing.T) {
	gvk := schema.GroupVersionKind{Group: "g", Version: "v", Kind: "K"}
	upstream, err := managedfields.NewDefaultCRDFieldManager(managedfields.NewDeducedTypeConverter(), convertor{}, nil,
		nil, gvk, gvk.GroupVersion(), "", nil)
	if err != nil {
		t.Fatal(err)
	}
	cached := managed.CachedUpdates()
	m := managed.New(upstream)
	decode := func(body string) *unstructured.Unstructured {
		u := &unstructured.Unstructured{}
		if err := json.Unmarshal([]byte(body), &u.Object); err != nil {
			t.Fatal(body, err)
		}
		u.SetGroupVersionKind(gvk)
		u.SetName("n")
		return u
	}
	bodies := []string{
		`{"text":"a","other":"a"}`, `{"text":"b","other":"a"}`, `{"text":"b","other":"b"}`, `{"text":"","other":"b"}`,
		`{"text":"b"}`, `{"number":1}`, `{"number":2}`, `{"set":["a"]}`, `{"set":["b"]}`,
		`{"map":{"k":"v","l":"v"}}`, `{"map":{"k":"w","l":"v"}}`, `{"map":{"k":"v","l":"w"}}`,
	}
	for _, creator := range []string{"a", "b"} {
		for _, from := range bodies {
			live := aged(m.UpdateNoErrors(decode(`{}`), decode(from), creator))
			for _, to := range bodies {
				for _, manager := range []string{"a", "a", "b", "b"} {
					body := decode(to)
					want := entries(m.UpdateNoErrors(live.DeepCopyObject(), body.DeepCopyObject(), manager))
					if got := entries(m.Update(live, body, manager)); got != want {
						t.Errorf("%s to %s by %s:\n%swant\n%s", from, to, manager, got, want)
					}
				}
			}
		}
	}
	if managed.CachedUpdates() == cached {
		t.Error("no outcome was cached")
	}
}

// An update that sends other managedFields, an empty list, or managedFields with other times has upstream's outcome.
func TestSentManagedFieldsAreUpstreams(t *testing.T) {
	scope, live := lease(t)
	renew := func(fields []metav1.ManagedFieldsEntry) runtime.Object {
		l := live.DeepCopy()
		l.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
		l.ManagedFields = fields
		return l
	}
	scope.FieldManager.Update(live, renew(nil), "kubelet")
	fields := func() []metav1.ManagedFieldsEntry { return live.DeepCopy().ManagedFields }
	older, renamed, versions := fields(), fields(), fields()
	older[0].Time = &metav1.Time{Time: time.Unix(1, 0)}
	renamed[0].Manager = "other"
	versions[0].APIVersion = "coordination.k8s.io/v1beta1"
	for name, c := range map[string]struct {
		sent   []metav1.ManagedFieldsEntry
		cached float64
	}{
		"nil": {nil, 1}, "the same": {live.ManagedFields, 1}, "empty": {[]metav1.ManagedFieldsEntry{}, 0},
		"reset": {[]metav1.ManagedFieldsEntry{{}}, 0}, "older": {older, 0}, "renamed": {renamed, 0},
		"another version": {versions, 0},
	} {
		want := entries(scope.FieldManager.UpdateNoErrors(live.DeepCopy(), renew(c.sent), "kubelet"))
		before := managed.CachedUpdates()
		if got := entries(scope.FieldManager.Update(live.DeepCopy(), renew(c.sent), "kubelet")); got != want {
			t.Errorf("%s:\n%swant\n%s", name, got, want)
		}
		if got := managed.CachedUpdates() - before; got != c.cached {
			t.Errorf("%s: %v cached outcomes, want %v", name, got, c.cached)
		}
	}
}

// An outcome is not cached if the live object has a manager twice, or more managers than a key may have. A field
// manager of a single request caches nothing.
func TestUncachedUpdatesAreUpstreams(t *testing.T) {
	scope, live := lease(t)
	twice, many := live.DeepCopy(), live.DeepCopy()
	twice.ManagedFields = append(twice.ManagedFields, *twice.ManagedFields[0].DeepCopy())
	twice.ManagedFields[1].Time = &metav1.Time{Time: time.Unix(2000, 0)}
	for i := range 40 {
		many.ManagedFields = append(many.ManagedFields, *many.ManagedFields[0].DeepCopy())
		many.ManagedFields[i+1].Manager, many.ManagedFields[i+1].Operation = fmt.Sprint(i), "Apply"
	}
	for name, c := range map[string]struct {
		*managed.FieldManager
		live *coordination.Lease
	}{
		"twice": {scope.FieldManager, twice}, "many": {scope.FieldManager, many},
		"uncached": {managed.Uncached(scope.FieldManager.FieldManager), live},
	} {
		before := managed.CachedUpdates()
		for i := range 3 {
			l := c.live.DeepCopy()
			l.Spec.RenewTime, l.ManagedFields = &metav1.MicroTime{Time: time.Unix(int64(i), 1000)}, nil
			want := entries(c.UpdateNoErrors(c.live, l.DeepCopy(), "other"))
			if got := entries(c.Update(c.live, l, "other")); got != want {
				t.Errorf("%s:\n%swant\n%s", name, got, want)
			}
		}
		if managed.CachedUpdates() != before {
			t.Errorf("%s: the outcome was cached", name)
		}
	}
}

// lease returns the scope of Leases, and a Lease that kubelet has created.
func lease(t testing.TB) (*handlers.RequestScope, *coordination.Lease) {
	t.Helper()
	managed.ResetCache()
	fx := fixture.New(t)
	scope, _ := fx.Resources.BuiltIn.RequestScope(&commonv1.Resource{
		Group: "coordination.k8s.io", Version: "v1", Resource: "leases",
	})
	holder, seconds := "node-1", int32(40)
	l := &coordination.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Name: "node-1", Namespace: "kube-node-lease", UID: "u",
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "node-1", UID: "n"}},
		},
		Spec: coordination.LeaseSpec{
			HolderIdentity: &holder, LeaseDurationSeconds: &seconds,
			RenewTime: &metav1.MicroTime{Time: time.Unix(1, 0)},
		},
	}
	empty, err := scope.Creater.New(scope.Kind)
	if err != nil {
		t.Fatal(err)
	}
	l = scope.FieldManager.UpdateNoErrors(empty, l, "kubelet").(*coordination.Lease)
	l.ManagedFields[0].Time = &metav1.Time{Time: time.Unix(1000, 0)}
	return scope, l
}

// BenchmarkUpdate measures the managedFields of a Lease that its node renews.
func BenchmarkUpdate(b *testing.B) {
	scope, live := lease(b)
	renewed := live.DeepCopy()
	renewed.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
	b.Run("known", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			renewed.ManagedFields = nil
			scope.FieldManager.Update(live, renewed, "kubelet")
		}
	})
	b.Run("upstream", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			renewed.ManagedFields = nil
			scope.FieldManager.UpdateNoErrors(live, renewed, "kubelet")
		}
	})
}
