package customresources

import (
	"context"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"
	"sync"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	openapibuilder "k8s.io/apiextensions-apiserver/pkg/controller/openapi/builder"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/kube-openapi/pkg/handler"
	"k8s.io/kube-openapi/pkg/spec3"
	"k8s.io/kube-openapi/pkg/validation/spec"
)

// documents holds the OpenAPI v2 documents of a CRD by version. They are built on the first request.
type documents struct {
	mu sync.Mutex
	v2 map[string]*spec.Swagger
}

// Hashes returns a hash of the inputs of each group version's document.
func (t *Set) Hashes() map[schema.GroupVersion]string {
	inputs := map[schema.GroupVersion]hash.Hash{}
	_ = t.eachServed(func(s *servedCRD, version string) error {
		gv := s.Kind(version).GroupVersion()
		if inputs[gv] == nil {
			inputs[gv] = sha256.New()
		}
		_, err := io.WriteString(inputs[gv], s.inputs)
		return err
	})
	hashes := make(map[schema.GroupVersion]string, len(inputs))
	for gv, h := range inputs {
		hashes[gv] = fmt.Sprintf("%X", h.Sum(nil))
	}
	return hashes
}

// OpenAPIV3 returns the document of a group version, or nil if no CRD has it. It fails once ctx has ended. The document
// of a CRD takes 3 ms and 400 KB, so that none is kept.
func (t *Set) OpenAPIV3(ctx context.Context, gv schema.GroupVersion) (*spec3.OpenAPI, error) {
	var all []*spec3.OpenAPI
	err := t.eachServed(func(s *servedCRD, version string) error {
		if s.Kind(version).GroupVersion() != gv {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		doc, err := openapibuilder.BuildOpenAPIV3(s.CustomResourceDefinition, version,
			openapibuilder.Options{IncludeSelectableFields: true})
		if err != nil {
			return fmt.Errorf("%s in %s: %w", s.Name, version, err)
		}
		all = append(all, doc)
		return nil
	})
	if err != nil || len(all) == 0 {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return openapibuilder.MergeSpecsV3(all...)
}

// OpenAPIV2 returns the built-in document with the CRDs' documents merged into it. It fails once ctx has ended.
func (t *Set) OpenAPIV2(ctx context.Context, builtIn *spec.Swagger) (*spec.Swagger, error) {
	var all []*spec.Swagger
	err := t.eachServed(func(s *servedCRD, version string) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		s.docs.mu.Lock()
		defer s.docs.mu.Unlock()
		if s.docs.v2 == nil {
			s.docs.v2 = map[string]*spec.Swagger{}
		}
		if s.docs.v2[version] == nil {
			doc, err := openapibuilder.BuildOpenAPIV2(s.CustomResourceDefinition, version, openapibuilder.Options{
				V2:                      true,
				IncludeSelectableFields: true,
			})
			if err != nil {
				return fmt.Errorf("%s in %s: %w", s.Name, version, err)
			}
			doc.Definitions = handler.PruneDefaults(doc.Definitions)
			s.docs.v2[version] = doc
		}
		all = append(all, s.docs.v2[version])
		return nil
	})
	if err != nil || len(all) == 0 {
		return builtIn, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return openapibuilder.MergeSpecs(builtIn, all...)
}

// eachServed visits every served version of every established CRD, by group and name, until a visit fails.
func (t *Set) eachServed(visit func(s *servedCRD, version string) error) error {
	for _, s := range t.all() {
		if t.BuiltIn(s.Spec.Group) ||
			!apihelpers.IsCRDConditionTrue(s.CustomResourceDefinition, apiextensionsv1.Established) {
			continue
		}
		for _, v := range s.Spec.Versions {
			if v.Served {
				if err := visit(s, v.Name); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
