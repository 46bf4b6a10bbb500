package installer

import (
	"reflect"
	"slices"
	"strings"

	"golang.org/x/text/cases"
	"golang.org/x/text/language"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	genericapi "k8s.io/apiserver/pkg/endpoints"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/kube-openapi/pkg/common"
)

func (w *routeWriter) get(path string, params []common.Parameter) {
	o := w.object("GET")
	all := append([]common.Parameter{pretty}, params...)
	if g, ok := w.scope.Storage.(rest.GetterWithOptions); ok {
		opts, _, _ := g.NewGetOptions()
		all = append(all, w.versionedOptions(opts)...)
	}
	w.add("get", &route{
		method:    "GET",
		path:      path,
		operation: w.operation("read", false, ""),
		doc:       w.doc("read the specified ", "read % of the specified "),
		params:    all,
		produces:  w.produces("GET", false),
		writes:    o,
		responses: responses(o, 200),
	})
}

// versionedOptions returns the parameters of an internal options type in the served version.
func (w *routeWriter) versionedOptions(internal any) []common.Parameter {
	if _, ok := internal.(interface{ GetObjectKind() schema.ObjectKind }); !ok || reflect.ValueOf(internal).IsNil() {
		return nil
	}
	name := reflect.Indirect(reflect.ValueOf(internal)).Type().Name()
	versioned, err := w.scope.Creater.New(w.scope.Kind.GroupVersion().WithKind(name))
	if err != nil {
		if versioned, err = w.scope.Creater.New(w.scope.Resource.GroupVersion().WithKind(name)); err != nil {
			return nil
		}
	}
	return parameters(versioned)
}

func (w *routeWriter) list(path string, params []common.Parameter, all bool) {
	lister, _ := w.scope.Storage.(rest.Lister)
	kinds, _, err := w.scope.Typer.ObjectKinds(lister.NewList())
	if err != nil {
		return
	}
	list := w.sample(w.scope.Resource.GroupVersion().WithKind(kinds[0].Kind))
	doc := "list objects of kind "
	if w.scope.HasVerb("watch") {
		doc = "list or watch objects of kind "
	}
	w.add("list", &route{
		method:    "GET",
		path:      path,
		operation: w.operation("list", all, ""),
		doc:       doc + w.scope.Kind.Kind,
		params:    concat([]common.Parameter{pretty}, parameters(&metav1.ListOptions{}), params),
		produces:  w.produces("LIST", true),
		writes:    list,
		responses: responses(list, 200),
	})
}

func (w *routeWriter) watch(path string, params []common.Parameter, all, list bool) {
	event := metav1.WatchEvent{}
	suffix, doc, action := "", w.doc("watch changes to an object of kind ", "watch changes to % of an object of kind ")+
		". deprecated: use the 'watch' parameter with a list operation instead, filtered to a single item with the "+
		"'fieldSelector' parameter.", "watch"
	if list {
		suffix, action = "List", "watchlist"
		doc = w.doc("watch individual changes to a list of ", "watch individual changes to a list of % of ") +
			". deprecated: use the 'watch' parameter with a list operation instead."
	}
	w.add(action, &route{
		method:    "GET",
		path:      path,
		operation: w.operation("watch", all, suffix),
		doc:       doc,
		params:    concat([]common.Parameter{pretty}, parameters(&metav1.ListOptions{}), params),
		produces:  w.mediaTypes(true),
		writes:    event,
		responses: responses(event, 200),
	})
}

func (w *routeWriter) post(path string, params []common.Parameter) {
	o := w.object("POST")
	kind := w.scope.Kind.Kind
	if w.scope.Subresource != "" {
		kind = w.parent
	}
	doc := "create" + genericapi.GetArticleForNoun(kind, " ") + kind
	if w.scope.Subresource != "" {
		doc = "create " + w.scope.Subresource + " of" + genericapi.GetArticleForNoun(kind, " ") + kind
	}
	w.add("post", &route{
		method:    "POST",
		path:      path,
		operation: w.operation("create", false, ""),
		doc:       doc,
		params: concat([]common.Parameter{pretty}, parameters(&metav1.CreateOptions{}), params,
			[]common.Parameter{body(true)}),
		produces:  w.produces("POST", false),
		reads:     w.sample(w.scope.Kind),
		writes:    o,
		responses: responses(o, 200, 201, 202),
	})
}

func (w *routeWriter) replace(path string, params []common.Parameter) {
	o := w.object("PUT")
	w.add("put", &route{
		method:    "PUT",
		path:      path,
		operation: w.operation("replace", false, ""),
		doc:       w.doc("replace the specified ", "replace % of the specified "),
		params: concat([]common.Parameter{pretty}, parameters(&metav1.UpdateOptions{}), params,
			[]common.Parameter{body(true)}),
		produces:  w.produces("PUT", false),
		reads:     w.sample(w.scope.Kind),
		writes:    o,
		responses: responses(o, 200, 201),
	})
}

func (w *routeWriter) patch(path string, params []common.Parameter) {
	o := w.object("PATCH")
	w.add("patch", &route{
		method:    "PATCH",
		path:      path,
		operation: w.operation("patch", false, ""),
		doc:       w.doc("partially update the specified ", "partially update % of the specified "),
		params: concat([]common.Parameter{pretty}, parameters(&metav1.PatchOptions{}), params,
			[]common.Parameter{body(true)}),
		consumes: []string{string(types.JSONPatchType), string(types.MergePatchType),
			string(types.StrategicMergePatchType), string(types.ApplyYAMLPatchType)},
		produces:  w.produces("PATCH", false),
		reads:     metav1.Patch{},
		writes:    o,
		responses: responses(o, 200, 201),
	})
}

func (w *routeWriter) remove(path string, params []common.Parameter, collection bool) {
	var payload any = metav1.Status{}
	action, operation, codes := "delete", w.operation("delete", false, ""), []int{200, 202}
	extra := parameters(&metav1.DeleteOptions{})
	article := genericapi.GetArticleForNoun(w.parent, " ")
	doc := w.doc("delete"+article, "delete % of"+article)
	if collection {
		action, operation, codes = "deletecollection", w.operation("deletecollection", false, ""), []int{200}
		doc = w.doc("delete collection of ", "delete collection of % of a ")
		extra = append(extra, parameters(&metav1.ListOptions{}, "watch", "allowWatchBookmarks")...)
	} else if m, ok := w.scope.Storage.(rest.MayReturnFullObjectDeleter); ok && m.DeleteReturnsDeletedObject() {
		payload = w.object("DELETE")
	}
	w.add(action, &route{
		method:    "DELETE",
		path:      path,
		operation: operation,
		doc:       doc,
		params:    concat([]common.Parameter{pretty}, extra, params, []common.Parameter{body(false)}),
		produces:  w.produces("DELETE", false),
		reads:     metav1.DeleteOptions{},
		writes:    payload,
		responses: responses(payload, codes...),
	})
}

func (w *routeWriter) connect(path string, params []common.Parameter, suffix string) {
	c := w.scope.Storage.(rest.Connecter)
	opts, _, _ := c.NewConnectOptions()
	for _, method := range c.ConnectMethods() {
		var o any = "string"
		if m, ok := w.scope.Storage.(rest.StorageMetadata); ok && m.ProducesObject(method) != nil {
			o = m.ProducesObject(method)
		}
		w.add("connect", &route{
			method: method,
			path:   path,
			operation: w.operation("connect"+cases.Title(language.English).String(strings.ToLower(method)),
				false, suffix),
			doc:       w.doc("connect "+method+" requests to ", "connect "+method+" requests to % of "),
			params:    concat(w.versionedOptions(opts), params),
			produces:  []string{"*/*"},
			writes:    o,
			responses: responses(o, 200),
		})
	}
}

func concat(lists ...[]common.Parameter) []common.Parameter {
	var all []common.Parameter
	seen := map[string]bool{}
	for _, l := range lists {
		for _, p := range l {
			if !seen[p.Name()] {
				seen[p.Name()] = true
				all = append(all, p)
			}
		}
	}
	return all
}

// parameters returns the query parameters of an options type's fields, without the fields in except.
func parameters(options any, except ...string) []common.Parameter {
	docs := map[string]string{}
	if d, ok := options.(interface{ SwaggerDoc() map[string]string }); ok {
		docs = d.SwaggerDoc()
	}
	var all []common.Parameter
	t := reflect.TypeOf(options).Elem()
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		dataType, ok := jsonType(f.Type)
		if name == "" || !ok || slices.Contains(except, name) {
			continue
		}
		all = append(all, parameter{
			name:        name,
			description: docs[name],
			dataType:    dataType,
			kind:        common.QueryParameterKind,
		})
	}
	return all
}

func jsonType(t reflect.Type) (string, bool) {
	switch t.Kind() {
	case reflect.Pointer:
		if t.Elem() == reflect.TypeFor[metav1.Time]() {
			return "string", true
		}
		return jsonType(t.Elem())
	case reflect.Slice:
		return jsonType(t.Elem())
	case reflect.Struct, reflect.Interface, reflect.Map:
		return "", false
	case reflect.Bool:
		return "boolean", true
	case reflect.String, reflect.Uint8:
		return "string", true
	case reflect.Float32, reflect.Float64:
		return "number", true
	}
	return "integer", true
}
